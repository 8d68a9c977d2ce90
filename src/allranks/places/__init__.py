"""Where processes run. A place plans a job purely; the launcher carries the plan out."""
