"""Library code of the experiments; scripts/ holds the command lines over it."""
