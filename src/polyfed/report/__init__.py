"""Pictures and pages for people: what was declared, what was run, what came out."""
