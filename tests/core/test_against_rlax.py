"""Being written by the helper that wrote test_masking.py and test_advantage.py; batching and value transforms are the other helper's."""
