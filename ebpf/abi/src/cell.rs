//! Relaxed loads and stores of words that programs and userspace both change.
//!
//! LLVM 22 has no BPF instruction for an atomic load or store before instruction set v4 (kernel
//! 6.6) and fails to compile. For BPF, a volatile access of an aligned word is one instruction and
//! so never tears, which is all that relaxed ordering requires.
use core::sync::atomic::{AtomicU32, AtomicU64};

macro_rules! cell {
    ($load:ident, $store:ident, $atomic:ty, $word:ty) => {
        /// Loads the word with relaxed ordering.
        #[inline(always)]
        pub fn $load(cell: &$atomic) -> $word {
            #[cfg(target_arch = "bpf")]
            // SAFETY: the reference is valid; see the module about tearing.
            return unsafe { cell.as_ptr().read_volatile() };
            #[cfg(not(target_arch = "bpf"))]
            return cell.load(core::sync::atomic::Ordering::Relaxed);
        }

        /// Stores the word with relaxed ordering.
        #[inline(always)]
        pub fn $store(cell: &$atomic, word: $word) {
            #[cfg(target_arch = "bpf")]
            // SAFETY: as above.
            return unsafe { cell.as_ptr().write_volatile(word) };
            #[cfg(not(target_arch = "bpf"))]
            return cell.store(word, core::sync::atomic::Ordering::Relaxed);
        }
    };
}

cell!(load32, store32, AtomicU32, u32);
cell!(load64, store64, AtomicU64, u64);
