"""The demo: the same traffic through the real LiteLLM proxy, once with round robin and once with prefix routing."""
