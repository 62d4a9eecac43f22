"""The maths behind `functional`: outer products and convolution windows."""
