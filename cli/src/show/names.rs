//! What the engines know and the kernel's tables do not have, asked of the brokers: names, and what
//! is relayed.
use std::{
    collections::{BTreeMap, HashMap},
    path::Path,
};

use slipgate_ipc::{
    client::{ClientAnswer, ClientRequest, ask},
    engine::{
        EngineInventory, EngineReply, EngineRequest, LiveRelayed, NameCounts, RefusedSample,
        RelayedCounts,
    },
};

use crate::brokers::sockets;

/// Pages read of one engine at most: far more than a full table has.
const MOST_PAGES: usize = 4_096;

/// All that is known.
#[derive(Debug, Default)]
pub(crate) struct Known {
    /// What was refused in DNS, by VM.
    pub(crate) vms: BTreeMap<String, NameCounts>,
    /// What was refused, by VM: of each kind the last.
    pub(crate) refused: BTreeMap<String, Vec<RefusedSample>>,
    /// The names that opened flows' addresses, by slot and generation.
    pub(crate) flows: HashMap<(u32, u32), String>,
    /// What was relayed, by VM.
    pub(crate) relayed: BTreeMap<String, RelayedCounts>,
    /// The relayed flows that live.
    pub(crate) relayed_flows: Vec<LiveRelayed>,
}

/// Asks every broker here. Who may not ask, or whose broker is gone, sees nothing of it.
pub(crate) fn ask_all(pin_dir: &Path) -> Known {
    let mut known = Known::default();
    for socket in sockets(pin_dir).unwrap_or_default() {
        let mut from = 0;
        for _ in 0..MOST_PAGES {
            let request = ClientRequest::Engine {
                about: None,
                ask: EngineRequest::Inventory { from },
            };
            let Ok(ClientAnswer::Engine {
                reply: EngineReply::Inventory(page),
            }) = ask(&socket, request)
            else {
                break;
            };
            let EngineInventory {
                vms,
                refused,
                flows,
                relayed,
                relayed_flows,
                next,
            } = page;
            known.relayed.extend(relayed);
            known.relayed_flows.extend(relayed_flows);
            known.vms.extend(vms);
            for sample in refused {
                let of_vm = known.refused.entry(sample.vm.clone());
                of_vm.or_default().push(sample);
            }
            let flows = flows.into_iter();
            known
                .flows
                .extend(flows.map(|(slot, generation, name)| ((slot, generation), name)));
            match next {
                Some(next) if next > from => from = next,
                _ => break,
            }
        }
    }
    known
}
