"""From a plan to committed snapshots: staging machines and what each verb does to them."""
