//! Frames behind slipgate's pacing device: the queue in front of it has let them go at their VM's
//! rate, and they go on by the uplink that [`super::guest_egress`] chose. The device is a pair: a
//! frame that is sent by the near end arrives by the far end, where this program is.
use super::Kernel;

/// Where a paced frame goes on to. It travels in the frame's mark.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Onward {
    /// Interface index of the uplink.
    pub ifindex: u32,
    /// Whether the frame has no L2 header of the uplink yet, and the kernel has to make one.
    pub by_neighbour: bool,
}

/// Bit of the mark: [`Onward::by_neighbour`].
const BY_NEIGHBOUR: u32 = 1 << 31;

impl Onward {
    /// The mark. An ifindex is an `int` of the kernel's, so its highest bit is free.
    #[inline(always)]
    pub const fn mark(self) -> u32 {
        let by_neighbour = if self.by_neighbour { BY_NEIGHBOUR } else { 0 };
        self.ifindex & !BY_NEIGHBOUR | by_neighbour
    }

    /// Reads a mark; `None` if it is none of these.
    #[inline(always)]
    pub const fn of_mark(mark: u32) -> Option<Self> {
        match mark & !BY_NEIGHBOUR {
            0 => None,
            ifindex => Some(Self {
                ifindex,
                by_neighbour: mark & BY_NEIGHBOUR != 0,
            }),
        }
    }
}

/// Sends a frame on that the pacer has let go. A frame of anybody else is dropped: the host has
/// nothing to send there.
#[inline(always)]
pub fn run<K: Kernel>(kernel: K) -> K::End {
    let Some(onward) = Onward::of_mark(kernel.take_mark()) else {
        return kernel.discard();
    };
    if onward.by_neighbour {
        kernel.redirect_by_neighbour(onward.ifindex)
    } else {
        kernel.redirect(onward.ifindex)
    }
}

#[cfg(test)]
#[path = "pacer_test.rs"]
mod tests;
