"""Measuring: what is asked, what came out, and how it is shown. Who measures with torch imports it only then."""
