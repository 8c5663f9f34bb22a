/* Included before all of llama.cpp (see peers.sh). GCC 12 and older declare that `_tile_loadconfig` reads 8 bytes of its
 * 64, so stores of the others are left out as dead, and on a CPU with AMX the first tile instruction ends the process. */
#if defined(__GNUC__) && !defined(__clang__) && __GNUC__ < 13 && defined(__AMX_TILE__)
#include <immintrin.h>
#undef _tile_loadconfig
#define _tile_loadconfig(config) __asm__ volatile("ldtilecfg %0" : : "m"(*(const char(*)[64])(config)) : "memory")
#endif
