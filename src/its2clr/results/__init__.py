"""Seeing the results: predictions for new bags, maps, GeoJSON, report and viewer."""
