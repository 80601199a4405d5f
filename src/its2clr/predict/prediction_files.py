"""Names of the files in a folder of predictions: what predicts, shows and scores them agrees on these."""

PREDICTIONS = "predictions.csv"
INSTANCES = "instances.parquet"
PROVENANCE = "prediction.json"
SCORES = "scores.json"
