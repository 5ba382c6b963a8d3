/* Runs a kernel, named by the argument, on a call that `replaying.py` has recorded, on machines without Python: reads
   the memory of the call from standard input, and writes what it holds afterwards to standard output.

   The input is numbers of 64 bits: how many buffers, how many addresses, the buffers' sizes, then of each address the
   buffer and place it stands at and the buffer and place it points to; the first address is the call's own and stands
   nowhere. The buffers' contents follow. The output is their contents. */
#include "simd.h"
#include <stdio.h>
#include <stdlib.h>

#define KERNEL(name) void KVC_NAME(name, KVC_LEVEL)(void *);
KERNELS
#undef KERNEL
#define KERNEL(name) {#name, KVC_NAME(name, KVC_LEVEL)},
static const struct { const char *name; void (*run)(void *); } kernels[] = {KERNELS};

static void get(void *to, size_t size) {
    if (fread(to, 1, size, stdin) != size) exit(2);
}
int main(int count, char **words) {
    int64_t numbers[2];
    get(numbers, sizeof numbers);
    int64_t *sizes = malloc(8 * (size_t)numbers[0]), (*addresses)[4] = malloc(32 * (size_t)numbers[1]);
    char **buffers = malloc(sizeof(char *) * (size_t)numbers[0]);
    get(sizes, 8 * (size_t)numbers[0]), get(addresses, 32 * (size_t)numbers[1]);
    for (int64_t i = 0; i < numbers[0]; i++) {
        buffers[i] = aligned_alloc(64, ((size_t)sizes[i] + 63) / 64 * 64);
        get(buffers[i], (size_t)sizes[i]);
    }
    for (int64_t i = 1; i < numbers[1]; i++) {
        char *to = buffers[addresses[i][2]] + addresses[i][3];
        memcpy(buffers[addresses[i][0]] + addresses[i][1], &to, sizeof to);
    }
    for (size_t i = 0; i < sizeof kernels / sizeof *kernels; i++) {
        if (count < 2 || strcmp(words[1], kernels[i].name)) continue;
        kernels[i].run(buffers[addresses[0][2]] + addresses[0][3]);
        for (int64_t b = 0; b < numbers[0]; b++) fwrite(buffers[b], 1, (size_t)sizes[b], stdout);
        return 0;
    }
    return 3;
}
