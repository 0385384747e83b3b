"""Run the command line as a module: `python -m fedcg`."""

from fedcg.cli import main

if __name__ == "__main__":
    main()
