// Copies stretches of memory, each somewhere on the device or in host memory that it reaches.
//
// A warp takes a stretch: its 32 threads read and write neighbouring words, so that one stretch
// is few, full requests on the link. Each thread has four words on their way before it writes
// the first: over the link a read takes a microsecond or two, and only what is on its way in the
// meantime fills it. Blocks are few, so that most processors stay with other work.

struct Stretch {
    unsigned long long to, from, bytes;
};

// Read and written by one instruction.
struct alignas(16) TwoWords {
    unsigned long long low, high;
};

static const unsigned int WARP = 32;

template <typename Word>
__device__ void copy_stretches(const Stretch* stretches, unsigned int count)
{
    const unsigned int lane = threadIdx.x % WARP;
    const unsigned int warps = gridDim.x * (blockDim.x / WARP);
    const unsigned int first = blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP;
    for (unsigned int i = first; i < count; i += warps) {
        Word* const to = reinterpret_cast<Word*>(stretches[i].to);
        const Word* const from = reinterpret_cast<const Word*>(stretches[i].from);
        const unsigned long long words = stretches[i].bytes / sizeof(Word);
        unsigned long long at = lane;
        for (; at + 3 * WARP < words; at += 4 * WARP) {
            const Word one = from[at];
            const Word two = from[at + WARP];
            const Word three = from[at + 2 * WARP];
            const Word four = from[at + 3 * WARP];
            to[at] = one;
            to[at + WARP] = two;
            to[at + 2 * WARP] = three;
            to[at + 3 * WARP] = four;
        }
        for (; at < words; at += WARP)
            to[at] = from[at];
    }
}

// All addresses and sizes are multiples of 16.
extern "C" __global__ void copy_by_16(const Stretch* stretches, unsigned int count)
{
    copy_stretches<TwoWords>(stretches, count);
}

// All addresses and sizes are multiples of 8.
extern "C" __global__ void copy_by_8(const Stretch* stretches, unsigned int count)
{
    copy_stretches<unsigned long long>(stretches, count);
}
