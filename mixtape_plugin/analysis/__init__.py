"""What is studied in models and trainings; scripts/ has the command lines over it."""
