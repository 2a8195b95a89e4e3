"""Several hosts on one machine (network namespaces) with a slow link between them."""
