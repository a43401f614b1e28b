/* Workload macros of a 2-D convolution: x[N,H,W,C], filters w[K,R,S,C/groups], y[N,P,Q,K], all contiguous. */
#ifndef KT_CPU_CONV2D_H
#define KT_CPU_CONV2D_H

#ifndef KT_IMAGES
#define KT_IMAGES 1 /* N */
#endif
#ifndef KT_HEIGHT
#define KT_HEIGHT 56 /* H */
#endif
#ifndef KT_WIDTH
#define KT_WIDTH 56 /* W */
#endif
#ifndef KT_CHANNELS
#define KT_CHANNELS 64 /* C */
#endif
#ifndef KT_FILTERS
#define KT_FILTERS 64 /* K */
#endif
#ifndef KT_R
#define KT_R 3
#endif
#ifndef KT_S
#define KT_S 3
#endif
#ifndef KT_STRIDE_H
#define KT_STRIDE_H 1
#endif
#ifndef KT_STRIDE_W
#define KT_STRIDE_W 1
#endif
#ifndef KT_PAD_H
#define KT_PAD_H 1
#endif
#ifndef KT_PAD_W
#define KT_PAD_W 1
#endif
#ifndef KT_DILATION_H
#define KT_DILATION_H 1
#endif
#ifndef KT_DILATION_W
#define KT_DILATION_W 1
#endif
#ifndef KT_GROUPS
#define KT_GROUPS 1
#endif

#define KT_P (((long)KT_HEIGHT + 2 * KT_PAD_H - (long)KT_DILATION_H * (KT_R - 1) - 1) / KT_STRIDE_H + 1)
#define KT_Q (((long)KT_WIDTH + 2 * KT_PAD_W - (long)KT_DILATION_W * (KT_S - 1) - 1) / KT_STRIDE_W + 1)
#define KT_GROUP_CHANNELS (KT_CHANNELS / KT_GROUPS)
#define KT_GROUP_FILTERS (KT_FILTERS / KT_GROUPS)
#define KT_X_ROW ((long)KT_WIDTH * KT_CHANNELS) /* elements of a row of x */
#define KT_X_IMAGE (KT_HEIGHT * KT_X_ROW)

_Static_assert(KT_CHANNELS % KT_GROUPS == 0 && KT_FILTERS % KT_GROUPS == 0, "groups divide channels and filters");
#ifdef KT_EXPECT_P
_Static_assert(KT_P == KT_EXPECT_P && KT_Q == KT_EXPECT_Q, "output size");
#endif

#endif
