"""`allranks new`: the templates of tasks, and the verb that copies one."""
