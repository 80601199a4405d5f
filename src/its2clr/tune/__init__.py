"""The search for better settings on validation bags, on Optuna; never a test label."""
