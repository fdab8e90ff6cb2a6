//! Forwarded ports: their sockets, their keys in the map, and the rules that their flows show.
use std::ops::Range;

use anyhow::Context as _;
use slipgate_abi::{ForwardKey, ForwardTarget};
use slipgate_control::maps::Insert;
use slipgate_policy::{Described, PolicySet, document::Forward};

use super::{Attached, reserve};
use crate::config::Config;

impl Attached {
    /// Takes the forwards' ports of the host.
    pub(crate) fn reserve_forwards(&mut self) -> anyhow::Result<()> {
        let forwards = self.config.forwards.iter();
        self.forward_sockets = forwards.map(reserve::reserve).collect::<Result<_, _>>()?;
        Ok(())
    }

    /// Leads the world's first packets on forwarded ports to the engine. Their sockets are bound by
    /// now: nobody else's port is taken. A forward of loopback is the host's alone, which comes by its
    /// socket: whoever is on the uplink's link could send to that address too.
    pub(crate) fn write_forwards(&self) -> anyhow::Result<()> {
        let forwards = &self.datapath.maps().forwards;
        let ours = |target: &ForwardTarget| self.vms.iter().any(|vm| vm.open.id == target.vm);
        forwards.remove_if(|_, target| ours(target))?;
        let from_links = |forward: &&Forward| !forward.host.is_loopback();
        for forward in self.config.forwards.iter().filter(from_links) {
            let vm = &self.vms[forward.vm].open;
            let key = ForwardKey {
                host: forward.host.into(),
                port: forward.host_port,
                protocol: forward.protocol,
                pad: 0,
            };
            let target = ForwardTarget {
                vm: vm.id,
                vm_row: vm.row,
                guest_port: forward.guest_port,
                pad: [0; 6],
            };
            forwards
                .insert(&key, &target, Insert::Any)
                .with_context(|| format!("forwarding port {}", forward.host_port))?;
        }
        Ok(())
    }

    /// The elements of `RULES` that forwards' flows show: the last of those in force.
    pub(crate) fn forward_rules(&self) -> Range<u32> {
        forwards_of(&self.rules, &self.config)
    }

    /// The element of `RULES` that a forward's flows show.
    pub(crate) fn forward_rule(&self, forward: &Forward) -> u32 {
        let at = forward_texts(&self.config).position(|text| text == forward_text(forward));
        self.forward_rules().start + at.map_or(0, |at| at as u32)
    }
}

/// The policies' rules, and behind them the forwards.
pub(crate) fn described(policies: &PolicySet, config: &Config) -> Vec<Described> {
    let forwards = forward_texts(config).map(Described::forward);
    policies.described().chain(forwards).collect()
}

/// The forwards' part of a run of rules.
pub(crate) fn forwards_of(rules: &Range<u32>, config: &Config) -> Range<u32> {
    rules.end - forward_texts(config).count() as u32..rules.end
}

/// One text per flag, whatever its range.
pub(crate) fn forward_texts(config: &Config) -> impl Iterator<Item = String> {
    let mut texts: Vec<String> = config.forwards.iter().map(forward_text).collect();
    texts.dedup();
    texts.into_iter()
}

fn forward_text(forward: &Forward) -> String {
    format!("--forward {}", forward.spec)
}
