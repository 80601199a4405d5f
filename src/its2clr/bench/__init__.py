"""`its2clr bench`: how close the stages come to what the machine can do, as ratios measured in one run."""
