//! State that only the engines have, read through the brokers: names and relayed flows.
use std::{
    collections::{BTreeMap, HashMap},
    path::Path,
};

use slipgate_abi::{IfIndex, SlotIndex};
use slipgate_ipc::{
    client::{ClientAnswer, ClientRequest, ask},
    engine::{
        EngineInventory, EngineReply, EngineRequest, GuestTcpCounts, LiveRelayed, MappingCounts,
        NameCounts, RefusedSample, RelayedCounts,
    },
};

use slipgate_model::Labels;

use crate::brokers::sockets;

/// Pages read of one engine at most: far more than a full table has.
const MOST_PAGES: usize = 4_096;

/// State of the engines that the pinned maps do not show.
#[derive(Debug, Default)]
pub(crate) struct Known {
    /// Names of links by which flows leave.
    pub(crate) links: HashMap<IfIndex, String>,
    /// Labels of the VMs, by VM name.
    pub(crate) labels: BTreeMap<String, Labels>,
    /// Counts of DNS refusals, by VM.
    pub(crate) vms: BTreeMap<String, NameCounts>,
    /// Refusals by VM, with the last of each kind.
    pub(crate) refused: BTreeMap<String, Vec<RefusedSample>>,
    /// The names that opened flows' addresses, by slot and generation.
    pub(crate) flows: HashMap<(SlotIndex, u32), String>,
    /// Endpoint-independent mappings, by VM.
    pub(crate) mappings: BTreeMap<String, MappingCounts>,
    /// What the engines' own TCP keeps, by VM.
    pub(crate) tcp: BTreeMap<String, GuestTcpCounts>,
    /// Traffic of relayed flows, by VM.
    pub(crate) relayed: BTreeMap<String, RelayedCounts>,
    /// The relayed flows that live.
    pub(crate) relayed_flows: Vec<LiveRelayed>,
}

impl Known {
    /// Adds a page of an engine's inventory.
    pub(crate) fn add(&mut self, page: EngineInventory) {
        self.links.extend(page.links);
        self.labels.extend(page.labels);
        self.mappings.extend(page.mappings);
        self.tcp.extend(page.tcp);
        self.relayed.extend(page.relayed);
        self.relayed_flows.extend(page.relayed_flows);
        self.vms.extend(page.vms);
        for sample in page.refused {
            let of_vm = self.refused.entry(sample.vm.clone());
            of_vm.or_default().push(sample);
        }
        let flows = page.flows.into_iter();
        self.flows
            .extend(flows.map(|(slot, generation, name)| ((slot, generation), name)));
    }
}

/// Reads the inventories of all brokers here. A broker that is gone, or that refuses this user,
/// contributes nothing.
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
            let next = page.next;
            known.add(page);
            match next {
                Some(next) if next > from => from = next,
                _ => break,
            }
        }
    }
    known
}
