"""The runs that the controller keeps alive, and their coordinators."""
