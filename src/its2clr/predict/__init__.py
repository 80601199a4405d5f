"""Predicting with a trained model: the model file, new bags packed as in training, scores against labels."""
