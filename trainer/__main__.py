"""`python -m trainer` and `torchrun --nproc-per-node N -m trainer`."""

from trainer.cli import main

if __name__ == "__main__":
    main()
