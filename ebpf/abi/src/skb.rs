//! What the programs read of the kernel's own `struct sk_buff`.

/// Where it is: bytes from the struct's start, different between kernels. The loader finds it in
/// the kernel's BTF and sets it as the global [`SKB_LAYOUT`].
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SkbLayout {
    /// `csum_start`: where checksumming starts, from the buffer's head; `u16`.
    pub csum_start: u32,
    /// `csum_offset`: where the sum goes, from there; `u16`.
    pub csum_offset: u32,
    /// `mac_header`: where the frame starts, from the buffer's head; `u16`.
    pub mac_header: u32,
}

/// The global's name in the object.
pub const SKB_LAYOUT: &str = "SKB_LAYOUT";
