"""Recipes: settings as YAML, named by file."""
