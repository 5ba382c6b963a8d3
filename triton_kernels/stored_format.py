"""Constants of stored bytes: codecs and Triton's kernels import them, tests compare them with those in C."""

# Of the byte that is a token's scale: steps an octave, the byte of a scale of one, the last one that tokens may exceed
SCALE_STEPS, SCALE_OFFSET, LAST_SCALE = 16.0, 128, 255
# Below that share of what it would be without error, `z.q` says nothing about a scale
LEAST_GAIN = 0.3
# Tokens whose outliers are stored together: a place within a tile of up to 512 channels then fits 16 bits
OUTLIER_TILE = 64
