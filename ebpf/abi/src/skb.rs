//! Fields of the kernel's `struct sk_buff` that the programs read.

/// Offsets of the fields, bytes from the start of the struct. They differ between kernels. The
/// loader takes them from the kernel's BTF and stores them in the global [`SKB_LAYOUT`].
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SkbLayout {
    /// Offset of `csum_start` (`u16`): start of the checksummed bytes, from the buffer's head.
    pub csum_start: u32,
    /// Offset of `csum_offset` (`u16`): place of the checksum, from `csum_start`.
    pub csum_offset: u32,
    /// Offset of `mac_header` (`u16`): start of the frame, from the buffer's head.
    pub mac_header: u32,
}

/// Name of the global in the BPF object.
pub const SKB_LAYOUT: &str = "SKB_LAYOUT";
