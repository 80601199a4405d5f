"""Maps and pictures: where the positives are, as sheets, overlays, regions and GeoJSON."""
