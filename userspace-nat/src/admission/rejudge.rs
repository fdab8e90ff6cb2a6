//! New judgement of live flows, after a change of policies or by a successor.
use std::sync::atomic::Ordering::Relaxed;

use slipgate_abi::{SlotIndex, VmId, VmRow, slot::SlotFlags, tcp::TcpBits};

use super::{
    destination,
    hairpin::{is_kept_apart, lets_in_guest, may_hairpin},
};
use crate::{
    datapath::Datapath,
    flow::Entry,
    relay::Standing,
    state::{Core, Nat, Rules},
};
use slipgate_policy::OnReload;

/// Judges a flow by the present rules and forwards; `None`: it is not live. `may_stay` says of a VM
/// whether its flows are left if its policy says so.
pub(crate) fn judge_again<D: Datapath>(
    core: &Core<D>,
    slot: SlotIndex,
    now_ns: u64,
    may_stay: impl Fn(VmId) -> bool,
) -> Option<Standing> {
    let Core { nat, rules, .. } = core;
    let entry = nat.flows.entry(slot)?;
    if !entry.state.is_linked() || nat.flows.is_cut(slot) {
        return None;
    }
    let live = nat.datapath.slot(slot);
    let is_allowed = match live.flags() & SlotFlags::INBOUND {
        0 => {
            is_outbound_allowed(nat, rules, slot, now_ns)
                && !nat.is_off_pool(slot)
                && !leads_where_it_may_not(core, slot)
        }
        _ => is_inbound_allowed(core, slot, now_ns),
    };
    let leaves = || rules.judge.borrow().on_reload(live.id()) == OnReload::Keep;
    Some(match is_allowed {
        true => Standing::Stands,
        false if leaves() && may_stay(live.id()) => Standing::Left,
        false => Standing::Cut,
    })
}

/// Returns the flows of a VM that no forward would let in any more.
pub(crate) fn not_let_in<D: Datapath>(core: &Core<D>, vm: VmRow, now_ns: u64) -> Vec<SlotIndex> {
    let Core { nat, .. } = core;
    let slots = nat.flows.slots_of(vm).iter().copied();
    let came_in = |slot: &SlotIndex| {
        let live = nat.datapath.slot(*slot);
        let entry = nat.flows.entry(*slot);
        let is_linked = entry.is_some_and(|entry| entry.state.is_linked());
        is_linked
            && live.flags() & SlotFlags::INBOUND != 0
            && !is_inbound_allowed(core, *slot, now_ns)
    };
    slots.filter(came_in).collect()
}

/// Returns the flows between a VM and other guests of this host that are not admitted any more.
pub(crate) fn kept_apart<D: Datapath>(core: &Core<D>, vm: VmRow, now_ns: u64) -> Vec<SlotIndex> {
    let slots = core.nat.flows.slots_of(vm).iter().copied();
    let hairpins = slots.filter(|slot| core.nat.is_hairpin(*slot));
    let is_cut =
        |slot: &SlotIndex| judge_again(core, *slot, now_ns, |_| true) == Some(Standing::Cut);
    hairpins.filter(is_cut).collect()
}

fn is_inbound_allowed<D: Datapath>(core: &Core<D>, slot: SlotIndex, now_ns: u64) -> bool {
    let Core {
        nat,
        rules,
        forwards,
        vms,
        ..
    } = core;
    let live = nat.datapath.slot(slot);
    let world = nat.datapath.world_tuple(slot);
    let forward = forwards.matching(&world, live.id());
    let leads = forward.is_some_and(|forward| {
        forward.guest_port == live.guest_port()
            && (!nat.is_hairpin(slot) || lets_in_guest(nat, forward, &world))
    });
    let vm = vms.by_id(live.id());
    let leads =
        leads || is_mapped(nat, rules, slot) && is_outbound_allowed(nat, rules, slot, now_ns);
    if nat.is_hairpin(slot) {
        return leads && vm.is_some();
    }
    leads && vm.is_some_and(|vm| rules.may_come_in(&vm.net, nat.datapath.addresses(slot).remote))
}

/// Whether a flow that is led back in leads to a guest from which policies keep its own.
fn leads_where_it_may_not<D: Datapath>(core: &Core<D>, slot: SlotIndex) -> bool {
    let Core { nat, .. } = core;
    let to = destination(&nat.datapath.guest_tuple(slot)).filter(|_| nat.is_hairpin(slot));
    to.is_some_and(|to| is_kept_apart(core, nat.datapath.slot(slot).id(), to))
}

/// Whether the world's flow has the port of a mapping whose policy lets others in. With
/// address-dependent filtering the guest had a flow to its remote when it came.
fn is_mapped<D: Datapath>(nat: &Nat<D>, rules: &Rules, slot: SlotIndex) -> bool {
    let world = nat.datapath.world_tuple(slot);
    let Some((inside, _)) = nat.flows.mappings.by_outside(&world) else {
        return false;
    };
    let live = nat.datapath.slot(slot);
    let behaviour = rules.nat_behaviour(inside.vm, inside.protocol);
    (inside.vm, inside.port) == (live.id(), live.guest_port())
        && behaviour.lets_others_in()
        && !nat.is_off_pool(slot)
}

fn is_outbound_allowed<D: Datapath>(
    nat: &Nat<D>,
    rules: &Rules,
    slot: SlotIndex,
    now_ns: u64,
) -> bool {
    let live = nat.datapath.slot(slot);
    let Some(to) = destination(&nat.datapath.guest_tuple(slot)) else {
        return false;
    };
    // Guests with own addresses reach each other as the rules say of any address.
    let is_own = nat.flows.entry(slot).is_some_and(Entry::is_untranslated);
    if nat.is_hairpin(slot) && !is_own {
        return may_hairpin(rules, live.id(), to);
    }
    let by = rules.name_of(slot, live.generation().load(Relaxed));
    let rule = rules.texts.identity(live.rule_index(), &nat.datapath);
    let is_in_session = nat.flows.entry(slot).is_some_and(|e| e.is_held());
    let was_released = live.tcp().load(Relaxed) & TcpBits::HELD != 0;
    let was_inspected = is_in_session || was_released;
    let judge = rules.judge.borrow();
    judge.keeps(live.id(), to, by, rule.as_ref(), was_inspected, now_ns)
}
