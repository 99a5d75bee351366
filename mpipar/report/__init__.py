"""Views of a run: text for the console, one JSON object per step, tables. Nothing here computes a
result.
"""
