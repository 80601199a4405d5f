"""Random views of tiles: crops, flips, colours, blur."""
