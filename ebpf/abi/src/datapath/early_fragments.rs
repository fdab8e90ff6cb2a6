//! Copies fragments of the world that come before the first one of their datagram
//! ([`crate::early_fragment`]).
use core::sync::atomic::Ordering::{Relaxed, SeqCst};

use super::{
    Kernel, Maps as _,
    drops::NOBODY,
    fragment_table::{self, Name},
};
use crate::{
    EarlyFragmentRef,
    cell::load64,
    early_fragment::{MOST_L3_LEN, PLACES, claim, filled, may_claim, place, tag, taken},
};

/// In the place of a row: an engine has a copy of the fragment, which is to be freed.
pub(super) const TAKEN: u32 = u32::MAX - 1;

/// Bits of a length less 1: any of these has room in a copy, so the verifier needs no comparison. (Of
/// one it sees only the bound of the register that the compiler happens to compare.)
const LEN_MASK: u32 = 0x7ff;
const _: () = assert!(MOST_L3_LEN as u32 == LEN_MASK + 1);

/// Keeps a copy of a later fragment whose datagram is not in the fragment table. The packet is `len`
/// bytes at offset `at` of the frame. Returns whose the datagram is by now
/// ([`fragment_table::whose`]), or [`TAKEN`].
#[inline(never)]
pub(super) fn keep<K: Kernel, N: Name>(kernel: K, datagram: &N, at: usize, len: u32) -> u32 {
    let word = publish(kernel, datagram.hash(), at, len);
    if word == 0 {
        return NOBODY;
    }
    // The first one may have come meanwhile, and its engine have looked before the copy was there.
    let whose = fragment_table::whose(kernel, datagram);
    if !fragment_table::is_guests(whose) {
        return whose;
    }
    let Some(its_tag) = kernel.maps().early_tag(place(word)) else {
        return whose;
    };
    let gone = taken(word);
    match its_tag.word().compare_exchange(word, gone, SeqCst, Relaxed) {
        Err(now) if now == gone => TAKEN,
        // Withdrawn; or a later copy has its place, and nobody knows whether an engine had it before: at
        // worst it has the fragment twice, and counts the second as dropped.
        _ => whose,
    }
}

/// Publishes a copy. Returns its tag, whose lower half is its number; 0 if there is none.
#[inline(always)]
fn publish<K: Kernel>(kernel: K, hash: u32, at: usize, len: u32) -> u64 {
    let room = kernel.frame_len().wrapping_sub(at as u32);
    if len == 0 || len > MOST_L3_LEN as u32 || len > room {
        return 0;
    }
    let maps = kernel.maps();
    let Some(next) = maps.early_claim(PLACES) else {
        return 0;
    };
    let number = next.word().fetch_add(1, SeqCst);
    let (Some(its_claim), Some(its_tag), Some(copy)) = (
        maps.early_claim(place(number)),
        maps.early_tag(place(number)),
        maps.early_fragment(place(number)),
    ) else {
        return 0;
    };
    // Else a run that stalls fills it in, or this one has stalled.
    let (claim, before) = (claim(number), load64(its_claim.word()));
    let is_claimed = may_claim(before, number)
        && its_claim
            .word()
            .compare_exchange(before, claim, SeqCst, Relaxed)
            .is_ok();
    if !is_claimed {
        return 0;
    }
    // Whatever is there: an engine may have written it. One that reads the copy finds another tag now.
    its_tag.word().swap(claim, SeqCst);
    let is_filled = fill(kernel, copy, at, len);
    let word = if is_filled {
        tag(hash, number)
    } else {
        taken(number)
    };
    // What was written is seen before the tag; and the tag before this looks at the table.
    its_tag.word().swap(word, SeqCst);
    its_claim.word().swap(filled(number), SeqCst);
    if is_filled { word } else { 0 }
}

/// Fills a claimed place in. Returns whether the packet is whole.
#[inline(always)]
fn fill<K: Kernel>(kernel: K, copy: EarlyFragmentRef, from: usize, len: u32) -> bool {
    let at_ns = kernel.coarse_now_ns();
    let copy = copy.as_ptr();
    // SAFETY: the place is this run's until it is published, and has room for the longest packet.
    unsafe {
        (*copy).at_ns = at_ns;
        (*copy).ifindex = kernel.ifindex();
        // By way of the place, so that the compiler does not know it, and leaves the verifier what it
        // has to see: some bits, and more than nothing.
        let at = &raw mut (*copy).len;
        at.write_volatile((len - 1) as u16);
        let len = (u32::from(at.read_volatile()) & LEN_MASK) + 1;
        at.write_volatile(len as u16);
        let l3 = (&raw mut (*copy).l3).cast::<u8>();
        kernel.copy(from, l3, len)
    }
}
