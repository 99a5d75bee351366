"""Worked examples: small matrices before and after each barrier, on 2 or 4 ranks."""
