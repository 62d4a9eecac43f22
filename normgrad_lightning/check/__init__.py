"""The check: from "the map looks here" to "this is what the class rests on"."""
