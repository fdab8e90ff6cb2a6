//! Rows of `VMS`: opened by name, adopted if they exist, closed when their VM ends.
//!
//! A VM's id is used once; its row is reused. Data that attributes a packet to a VM names both, and
//! is trusted only while they agree.

use std::{
    collections::HashSet,
    net::{Ipv4Addr, Ipv6Addr},
    sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release},
    time::Duration,
};

use slipgate_abi::{Direction, IfIndex, TapEntry, VmId, VmRef, VmRow, vm::VmFlags};

pub use crate::vm_rows::{name_of, owner_of_name, rows_of};
use crate::{
    Error, Paths, Result,
    lock::FileLock,
    maps::{Insert, InsertError, SharedMaps, fill_text},
    owner::{Owner, is_process},
    vm_rows::{id_of, owner_of, row_named},
};

/// Size of the field `Vm::name`, bytes.
const NAME_BYTES: usize = 64;

/// Contents of a VM's row.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct VmSpec {
    /// Name, 1 to 64 bytes.
    pub name: String,
    /// Address that the guest must use.
    pub guest: Ipv4Addr,
    /// Address of the gateway.
    pub gateway: Ipv4Addr,
    /// Prefix length of the guest's network.
    pub prefix_len: u8,
    /// IPv6 network of the guest; `None`: it has none.
    pub ipv6: Option<Ipv6Spec>,
    /// MAC address that the guest must use. `None`: any; the programs learn the guest's MAC from
    /// what it sends, and until then address frames to it to the broadcast address.
    pub guest_mac: Option<[u8; 6]>,
    /// MAC address of the gateway.
    pub gateway_mac: [u8; 6],
    /// MTU of the TAP, L3 bytes.
    pub mtu: u32,
    /// Maximum number of frames under way to the engine.
    pub credits: u32,
    /// Number of the VM's policy.
    pub policy: u32,
    /// Ifindex of the TAP; `None`: it does not exist yet.
    pub tap_ifindex: Option<IfIndex>,
    /// Ifindex of the engine port.
    pub port_ifindex: IfIndex,
}

/// IPv6 network of a guest.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Ipv6Spec {
    /// First address of its /64, or its single address, which no /64 with the gateway has.
    pub prefix: Ipv6Addr,
    /// Address of the gateway.
    pub gateway: Ipv6Addr,
    /// Link-local address of the gateway.
    pub gateway_local: Ipv6Addr,
}

/// Identification of an open row.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct OpenVm {
    /// Id of the VM.
    pub id: VmId,
    /// Row of the VM.
    pub row: VmRow,
    /// Whether the row existed before: its flows continue.
    pub adopted: bool,
}

/// Opens a VM's row, and enters its TAP into `TAPS`. An adopted row keeps its id, its counters and,
/// if the spec gives none, its guest's MAC.
///
/// # Errors
/// The name is invalid, another process serves a VM of this name or the TAP, no row is free, or
/// `TAPS` cannot be changed.
pub fn open(maps: &SharedMaps, owner: &Owner, spec: &VmSpec) -> Result<OpenVm> {
    let max = NAME_BYTES;
    if spec.name.is_empty() || spec.name.len() > max || spec.name.contains('\0') {
        return Err(Error::VmName {
            name: spec.name.clone(),
            bytes: spec.name.len(),
            max,
        });
    }
    let found = row_named(maps, &spec.name);
    if let Some(tap) = spec.tap_ifindex {
        free_tap(maps, spec, tap, found)?;
    }
    let (row, adopted) = match found {
        Some(row) if owner_of(maps, row) == Some(owner.row()) => (row, true),
        Some(row) => {
            return Err(Error::VmInUse {
                name: spec.name.clone(),
                pid: maps.owner_pid(owner_of(maps, row).unwrap_or(u32::MAX)),
            });
        }
        None => (claim_row(maps)?, false),
    };
    let vm = maps.vm(row).expect("a row just found").as_ptr();
    // SAFETY: a mapped row that is ours. Programs read its fields one by one; those of an adopted
    // row change only where the spec does.
    unsafe {
        if !adopted {
            clear_counters(maps, row);
            (&raw mut (*vm).guest_mac).write_volatile(VmRef::UNKNOWN_MAC);
            (&raw mut (*vm).flags).write_volatile(0);
            maps.set_rates(row, None);
            maps.vm6(row).expect("as many rows as VMs").clear();
            if let Some(limits) = maps.rate_limits(row) {
                limits.clear_used();
            }
            maps.set_pacer(row, Direction::Tx, None);
            maps.set_pacer(row, Direction::Rx, None);
        }
        (&raw mut (*vm).owner).write_volatile(owner.row());
        (&raw mut (*vm).port_ifindex).write_volatile(spec.port_ifindex.get());
        (&raw mut (*vm).guest).write_volatile(spec.guest.into());
        (&raw mut (*vm).gateway).write_volatile(spec.gateway.into());
        (&raw mut (*vm).gateway_mac).write_volatile(spec.gateway_mac);
        (&raw mut (*vm).mtu).write_volatile(spec.mtu);
        (&raw mut (*vm).credits).write_volatile(spec.credits);
        (&raw mut (*vm).world_credits).write_volatile(spec.credits);
        (&raw mut (*vm).policy).write_volatile(spec.policy);
        (&raw mut (*vm).prefix_len).write_volatile(spec.prefix_len.into());
        (&raw mut (*vm).foreign_mac).write_volatile([0; 6]);
        if let Some(mac) = spec.guest_mac {
            (&raw mut (*vm).guest_mac).write_volatile(mac);
        }
        let mut name = [0; NAME_BYTES];
        fill_text(&mut name, &spec.name);
        (&raw mut (*vm).name).write_volatile(name);
    }
    let vm = maps.vm(row).expect("a row just found");
    match spec.guest_mac {
        Some(_) => vm.flags().fetch_or(VmFlags::CHECK_MAC, Release),
        None => vm.flags().fetch_and(!VmFlags::CHECK_MAC, Release),
    };
    set_ipv6(maps, row, spec.ipv6);
    let known = match spec.tap_ifindex {
        Some(tap) => set_tap(maps, row, tap),
        None => forget_tap(maps, row, None),
    };
    if let Err(error) = known {
        if !adopted {
            vm.id().store(0, Release);
        }
        return Err(error);
    }
    Ok(OpenVm {
        id: VmId::new(vm.id().load(Acquire)),
        row,
        adopted,
    })
}

/// Removes the TAP from the row of any other VM. A living process's VM keeps it, and the call
/// fails; a dead process's entry is of a time when another interface had the index.
fn free_tap(maps: &SharedMaps, spec: &VmSpec, tap: IfIndex, own: Option<VmRow>) -> Result<()> {
    let Some(entry) = maps.taps.get(&tap.get())? else {
        return Ok(());
    };
    let Some(row) = entry
        .row()
        .filter(|row| id_of(maps, *row) == Some(entry.id()))
    else {
        return Ok(());
    };
    if own == Some(row) {
        return Ok(());
    }
    let owner = owner_of(maps, row).unwrap_or(u32::MAX);
    let pid = maps.owner_pid(owner);
    if pid != std::process::id() && is_process(pid) {
        return Err(Error::TapInUse {
            name: spec.name.clone(),
            other: name_of(maps, row).unwrap_or_default(),
            pid,
        });
    }
    forget_tap(maps, row, Some(tap))
}

/// Sets the interface that is the VM's TAP, at first and when it was made again. Flows continue:
/// their slots name the row.
///
/// # Errors
/// `TAPS` cannot be changed, or is full.
pub fn set_tap(maps: &SharedMaps, row: VmRow, ifindex: IfIndex) -> Result<()> {
    let Some((vm, id)) = maps.vm(row).zip(id_of(maps, row)) else {
        return Ok(());
    };
    let entry = TapEntry::new(id, row);
    let before = vm.tap_ifindex().swap(ifindex.get(), AcqRel);
    if before != ifindex.get() && maps.taps.get(&before)? == Some(entry) {
        maps.taps.remove(&before)?;
    }
    maps.taps
        .insert(&ifindex.get(), &entry, Insert::Any)
        .map_err(|error| match error {
            InsertError::Os(error) => {
                Error::os(format!("make the TAP with index {ifindex} known"))(error)
            }
            InsertError::Full | InsertError::Exists | InsertError::Missing => Error::Full {
                what: "TAP",
                most: maps.sizes().vms + 1,
                remedy: "remove a VM",
            },
        })
}

/// Removes the VM's TAP, which is gone or shut. `known`: its index as the caller knows it. The row
/// may name another: engines write there.
///
/// # Errors
/// `TAPS` cannot be read or changed.
pub fn forget_tap(maps: &SharedMaps, row: VmRow, known: Option<IfIndex>) -> Result<()> {
    let Some((vm, id)) = maps.vm(row).zip(id_of(maps, row)) else {
        return Ok(());
    };
    let named = IfIndex::new(vm.tap_ifindex().swap(0, AcqRel));
    for tap in [Some(named), known].into_iter().flatten() {
        let entry = maps.taps.get(&tap.get())?;
        if entry.is_some_and(|entry| entry.id() == id) {
            maps.taps.remove(&tap.get())?;
        }
    }
    Ok(())
}

/// Sets the MTU of the VM's TAP, L3 bytes.
pub fn set_mtu(maps: &SharedMaps, row: VmRow, mtu: u32) {
    if let Some(vm) = maps.vm(row) {
        // SAFETY: a word of a mapped row.
        unsafe { (&raw mut (*vm.as_ptr()).mtu).write_volatile(mtu) };
    }
}

/// Gives the VM's guest an IPv6 network, or takes it away.
pub fn set_ipv6(maps: &SharedMaps, row: VmRow, ipv6: Option<Ipv6Spec>) {
    if let Some(vm) = maps.vm6(row) {
        vm.set(ipv6.map(|net| {
            let Ipv6Spec {
                prefix,
                gateway,
                gateway_local,
            } = net;
            (prefix.into(), gateway.into(), gateway_local.into())
        }));
    }
}

/// Returns the name of the VM that has this row, if it is the one with this id.
pub fn name_if_open(maps: &SharedMaps, row: VmRow, id: VmId) -> Option<String> {
    (id_of(maps, row) == Some(id)).then(|| name_of(maps, row))?
}

/// Sets the number of the VM's policy.
pub fn set_policy(maps: &SharedMaps, row: VmRow, policy: u32) {
    if let Some(vm) = maps.vm(row) {
        // SAFETY: a word of a mapped row.
        unsafe { (&raw mut (*vm.as_ptr()).policy).write_volatile(policy) };
    }
}

/// Closes a row whose flows have ended. The VM's TAP and forwards are removed by now, and its
/// addresses opened by names by the engine. What is left of these is without effect, since the id is
/// never used again; [`remove_entries`] removes it.
///
/// # Errors
/// `TAPS` cannot be read or changed.
pub fn close(maps: &SharedMaps, row: VmRow) -> Result<()> {
    forget_tap(maps, row, None)?;
    if let Some(vm) = maps.vm(row) {
        vm.id().store(0, Release);
    }
    Ok(())
}

/// Removes the entries of `TAPS`, `FORWARDS`, `FORWARDS6` and `NAMES` of VMs that are closed, in one walk over
/// these maps. `patience`: time-out of the lock of what is routed to VMs: another process may give it to
/// a VM of its own just now.
///
/// # Errors
/// One of the maps cannot be read or changed, or the lock is not obtained.
pub fn remove_entries(
    maps: &SharedMaps,
    paths: &Paths,
    closed: &HashSet<VmId>,
    patience: Duration,
) -> Result<()> {
    maps.taps.remove_if(|_, tap| closed.contains(&tap.id()))?;
    maps.forwards
        .remove_if(|_, forward| closed.contains(&forward.id()))?;
    maps.names.remove_if(|key, _| closed.contains(&key.id()))?;
    let _entries = FileLock::of_routed(&paths.run_dir, patience)?;
    maps.forwards6
        .remove_if(|_, forward| closed.contains(&forward.id()))?;
    Ok(())
}

/// Frees the name of a VM that is gone, for another VM. The row and id remain in use until its
/// flows have ended.
pub fn retire(maps: &SharedMaps, row: VmRow) {
    let Some((vm, id)) = maps.vm(row).zip(id_of(maps, row)) else {
        return;
    };
    let mut name = [0; NAME_BYTES];
    // A name that no user can give.
    fill_text(&mut name, &format!("(gone {id})"));
    // SAFETY: bytes of a mapped row that is ours.
    unsafe { (&raw mut (*vm.as_ptr()).name).write_volatile(name) };
}

/// Takes a free row for a new id. Ids count up, and so do the rows that are tried first: most of
/// those before are taken.
fn claim_row(maps: &SharedMaps) -> Result<VmRow> {
    let id = maps.next_vm_id().fetch_add(1, AcqRel);
    let rows = maps.vm_rows();
    let before = id.wrapping_sub(1) as usize % rows.len();
    let mut from_there = rows.clone().skip(before).chain(rows.take(before));
    from_there
        .find(|row| {
            maps.vm(*row)
                .is_some_and(|vm| vm.id().compare_exchange(0, id, AcqRel, Relaxed).is_ok())
        })
        .ok_or(Error::Full {
            what: "VM",
            most: maps.sizes().vms,
            remedy: "remove a VM, or serve further ones in another network namespace; a greater \
                     --max-vms makes more room at a start when no slipgate runs here and no flow is \
                     left",
        })
}

/// Clears the counters of the row's previous VM.
fn clear_counters(maps: &SharedMaps, row: VmRow) {
    let vm = maps.vm(row).expect("a row just claimed");
    for from_world in [false, true] {
        let (handed_over, taken_in) = vm.under_way(from_world);
        handed_over.store(0, Release);
        taken_in.store(0, Release);
    }
    vm.arp_answered().store(0, Release);
    maps.vm6(row).expect("as many rows as VMs").clear();
    let (drops, counters) = (maps.drops(row), maps.counters(row));
    // SAFETY: rows of a VM that is not served yet: no TAP names it.
    unsafe {
        drops.expect("as many rows as VMs").write_bytes(0, 1);
        counters.expect("as many rows as VMs").write_bytes(0, 1);
    }
}

#[cfg(test)]
#[path = "vm_test.rs"]
mod tests;
