//! The machines that `slipgate run` runs: their own counters, asked of the brokers.
use std::{collections::BTreeMap, path::Path};

use serde_json::Value;
use slipgate_ipc::client::{ClientAnswer, ClientRequest, ask};

use super::{
    super::table::{amount, table},
    VmStats,
};
use crate::brokers::sockets;

/// Counters by VM. Who may not ask sees none: the maps' are there all the same.
pub(super) fn ask_all(pin_dir: &Path) -> BTreeMap<String, Value> {
    let mut machines = BTreeMap::new();
    for socket in sockets(pin_dir).unwrap_or_default() {
        if let Ok(ClientAnswer::Machines { machines: some }) = ask(&socket, ClientRequest::Machines)
        {
            machines.extend(some);
        }
    }
    machines
}

/// A table of queue pairs, and one of vCPUs; nothing when there is no machine.
pub(super) fn text(vms: &[VmStats]) -> String {
    const PAIRS: [&str; 11] = [
        "VM",
        "QUEUE-PAIR",
        "TX-FRAMES",
        "BYTES",
        "RX-FRAMES",
        "BYTES",
        "KICKS",
        "INTERRUPTS",
        "SUPPRESSED",
        "SYSCALLS",
        "DROPS",
    ];
    const VCPUS: [&str; 4] = ["VM", "VCPU", "EXITS", "INTERRUPTED"];
    let (mut pairs, mut vcpus) = (Vec::new(), Vec::new());
    for (name, machine) in vms.iter().filter_map(|vm| Some((&vm.vm, vm.vmm.as_ref()?))) {
        for (index, pair) in each(&machine["net"]["pairs"]) {
            let count = |key: &str| pair[key].as_u64().unwrap_or(0);
            let mut row = vec![name.clone(), index.to_string()];
            row.extend(
                [
                    "tx_frames",
                    "tx_bytes",
                    "rx_frames",
                    "rx_bytes",
                    "kicks",
                    "interrupts",
                    "interrupts_suppressed",
                    "syscalls",
                ]
                .map(|key| amount(count(key))),
            );
            row.push(amount(sum(&pair["drops"])));
            pairs.push(row);
        }
        for (index, vcpu) in each(&machine["vcpus"]) {
            let interrupted = vcpu["interrupted"].as_u64().unwrap_or(0);
            // `unclaimed` are among the others.
            let unclaimed = vcpu["unclaimed"].as_u64().unwrap_or(0);
            let exits = sum(vcpu).saturating_sub(interrupted + unclaimed);
            let figures = [exits, interrupted].map(amount);
            vcpus.push(
                [name.clone(), index.to_string()]
                    .into_iter()
                    .chain(figures)
                    .collect(),
            );
        }
    }
    let mut text = String::new();
    if !pairs.is_empty() {
        text.push('\n');
        text.push_str(&table(&PAIRS, &pairs, &[1, 2, 3, 4, 5, 6, 7, 8, 9, 10]));
    }
    if !vcpus.is_empty() {
        text.push('\n');
        text.push_str(&table(&VCPUS, &vcpus, &[1, 2, 3]));
    }
    text
}

fn each(list: &Value) -> impl Iterator<Item = (usize, &Value)> {
    list.as_array().into_iter().flatten().enumerate()
}

/// Of all numbers in an object.
fn sum(object: &Value) -> u64 {
    let values = object.as_object().into_iter().flatten();
    values.filter_map(|(_, value)| value.as_u64()).sum()
}
