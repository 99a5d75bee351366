"""What a traced run shows: waits and their causes, efficiencies, the page, Perfetto, comparison."""
