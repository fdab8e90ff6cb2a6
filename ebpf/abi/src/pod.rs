//! Marks the types that userspace reads from and writes to maps as plain data.
use crate::*;

macro_rules! pod {
    ($($t:ty),+ $(,)?) => {
        // SAFETY: `repr(C)`, `Copy`, padding explicit. Types with enum fields (`Slot`) are left
        // out: they are reached through mapped memory and atomics only.
        $(unsafe impl aya::Pod for $t {})+
    };
}

pod!(
    Tuple,
    Tuple6,
    Addresses6,
    Vm6,
    FlowRef,
    TapEntry,
    Vm,
    NextHop,
    FirstPacket,
    ForwardKey,
    ForwardKey6,
    ForwardTarget,
    forward::DenyKey,
    forward::DenyKey6,
    DropCounters,
    VmCounters,
    maps::Meta,
    maps::Owner,
    maps::RuleElement,
    NameKey,
    NameValue,
    RateLimits,
    Sequences,
    skb::SkbLayout
);
