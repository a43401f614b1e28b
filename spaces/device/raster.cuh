// The order in which CTAs walk the tiles of C, for reuse in L2: strips of KT_GROUP tiles, walked across first.
#ifndef KT_RASTER_CUH
#define KT_RASTER_CUH

#include "types.cuh"

#ifndef KT_RASTER_M
#define KT_RASTER_M 1 /* 1: strips of KT_GROUP tile rows, m fastest inside; 0: of tile columns, n fastest */
#endif
#ifndef KT_GROUP
#define KT_GROUP 8
#endif

struct kt_place {
    u32 m, n; // tile row, tile column
};

KT_DEVICE kt_place kt_place_of(u32 t, u32 m_tiles, u32 n_tiles) {
    const u32 across = KT_RASTER_M ? m_tiles : n_tiles, along = KT_RASTER_M ? n_tiles : m_tiles;
    const u32 strip = t / (KT_GROUP * along), first = strip * KT_GROUP, inside = t % (KT_GROUP * along);
    const u32 width = kt_min(across - first, (u32)KT_GROUP);
    const u32 i = first + inside % width, j = inside / width;
    return KT_RASTER_M ? kt_place{i, j} : kt_place{j, i};
}

#endif
