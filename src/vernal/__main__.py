"""The command as `python -m vernal`."""

from vernal.adapters.launch import main

main()
