//! State of the display: the last reading, rates since the one before, and the user's choices.
use std::collections::{BTreeSet, HashMap};

use ratatui::crossterm::event::{KeyCode, KeyModifiers};
use slipgate_ipc::client::Target;
use slipgate_model::FlowId;

use super::target;
use crate::{
    args::TopOrder,
    show::{flows::Flow, stats::VmStats},
};

/// Everything at one moment.
#[derive(Clone, Debug, Default)]
pub(super) struct Reading {
    /// Time of the reading, `CLOCK_MONOTONIC`, ns.
    pub(super) at_ns: u64,
    pub(super) flows: Vec<Flow>,
    pub(super) vms: Vec<VmStats>,
    /// VMs of which nothing passes, by name.
    pub(super) frozen: BTreeSet<String>,
}

/// Bytes per second from and to the guest.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Rates {
    pub(super) tx: u64,
    pub(super) rx: u64,
}

impl Rates {
    pub(super) fn sum(self) -> u64 {
        self.tx + self.rx
    }
}

/// Action that a key requests.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Action {
    Nothing,
    Quit,
    /// Ask the broker for a change; with its description in words.
    Ask(Change, String),
}

/// Change that `top` requests from a broker.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Change {
    /// A flow, or all flows of a VM, are to end.
    Cut(Target),
    /// All packets of a VM are to be dropped.
    Freeze(String),
    /// The packets of a frozen VM are to pass again.
    Thaw(String),
}

#[derive(Debug, Default)]
pub(super) struct State {
    order: TopOrder,
    /// Show only this VM; `None`: all VMs.
    vm: Option<String>,
    reading: Reading,
    flow_rates: HashMap<FlowId, Rates>,
    vm_rates: HashMap<String, Rates>,
    filter: String,
    typing: bool,
    paused: bool,
    selected: Option<FlowId>,
    message: String,
}

impl State {
    pub(super) fn new(order: TopOrder, vm: Option<String>) -> Self {
        Self {
            order,
            vm,
            ..Self::default()
        }
    }

    /// Shows this reading from now on. New flows and VMs have no rate yet.
    pub(super) fn take(&mut self, reading: Reading) {
        let before = std::mem::replace(&mut self.reading, reading);
        let now = &self.reading;
        let ms = now.at_ns.saturating_sub(before.at_ns) / 1_000_000;
        let rate =
            |now: u64, before: u64| now.saturating_sub(before).saturating_mul(1_000) / ms.max(1);
        let rates = |now: (u64, u64), before: (u64, u64)| Rates {
            tx: rate(now.0, before.0),
            rx: rate(now.1, before.1),
        };
        let bytes: HashMap<FlowId, (u64, u64)> = before
            .flows
            .iter()
            .map(|flow| (flow.id, (flow.tx_bytes, flow.rx_bytes)))
            .collect();
        self.flow_rates = now
            .flows
            .iter()
            // A flow that began in between has come all its way since.
            .filter(|flow| bytes.contains_key(&flow.id) || flow.age_ms < ms)
            .map(|flow| {
                let before = bytes.get(&flow.id).copied().unwrap_or_default();
                (flow.id, rates((flow.tx_bytes, flow.rx_bytes), before))
            })
            .collect();
        let carried = |vm: &VmStats| {
            let relayed = vm.relayed.unwrap_or_default();
            let (tx, rx) = (vm.kernel.tx_bytes, vm.kernel.rx_bytes);
            (tx + relayed.tx_bytes, rx + relayed.rx_bytes)
        };
        let bytes: HashMap<&str, (u64, u64)> = before
            .vms
            .iter()
            .map(|vm| (vm.vm.as_str(), carried(vm)))
            .collect();
        let vms = now.vms.iter();
        self.vm_rates = vms
            .filter_map(|vm| {
                let before = bytes.get(vm.vm.as_str())?;
                Some((vm.vm.clone(), rates(carried(vm), *before)))
            })
            .collect();
    }

    /// The flows that are shown, in order.
    pub(super) fn flows(&self) -> Vec<&Flow> {
        let text = self.filter.to_lowercase();
        let mut flows: Vec<&Flow> = self
            .reading
            .flows
            .iter()
            .filter(|flow| self.vm.as_ref().is_none_or(|vm| **vm == *flow.vm))
            .filter(|flow| matches(flow, &text))
            .collect();
        let key = |flow: &Flow| match self.order {
            TopOrder::Rate => self.flow_rate(flow).sum(),
            TopOrder::Bytes => flow.tx_bytes + flow.rx_bytes,
            TopOrder::Age => flow.age_ms,
            TopOrder::Name => 0,
        };
        flows.sort_by(|a, b| {
            let by_number = key(b).cmp(&key(a));
            by_number.then_with(|| (peer(a), a.id).cmp(&(peer(b), b.id)))
        });
        flows
    }

    /// The VMs that are shown, those with most traffic first.
    pub(super) fn vms(&self) -> Vec<&VmStats> {
        let only = |vm: &&VmStats| self.vm.as_ref().is_none_or(|only| *only == vm.vm);
        let mut vms: Vec<&VmStats> = self.reading.vms.iter().filter(only).collect();
        vms.sort_by(|a, b| {
            let rate = |vm: &VmStats| self.vm_rate(vm).sum();
            (rate(b), &a.vm).cmp(&(rate(a), &b.vm))
        });
        vms
    }

    pub(super) fn flow_rate(&self, flow: &Flow) -> Rates {
        self.flow_rates.get(&flow.id).copied().unwrap_or_default()
    }

    pub(super) fn vm_rate(&self, vm: &VmStats) -> Rates {
        self.vm_rates.get(&vm.vm).copied().unwrap_or_default()
    }

    pub(super) fn is_frozen(&self, vm: &str) -> bool {
        self.reading.frozen.contains(vm)
    }

    pub(super) fn is_paused(&self) -> bool {
        self.paused
    }

    pub(super) fn order(&self) -> TopOrder {
        self.order
    }

    /// The filter, and whether it is being typed.
    pub(super) fn filter(&self) -> (&str, bool) {
        (&self.filter, self.typing)
    }

    pub(super) fn message(&self) -> &str {
        &self.message
    }

    pub(super) fn say(&mut self, message: String) {
        self.message = message;
    }

    /// Where the selected flow is among those shown. `None`: it is gone, or none was selected.
    pub(super) fn selected(&self, flows: &[&Flow]) -> Option<usize> {
        let is = |flow: &&Flow| Some(flow.id) == self.selected;
        flows.iter().position(is)
    }

    /// Records the VMs that are frozen now, which may have changed since the reading.
    pub(super) fn know_frozen(&mut self, frozen: BTreeSet<String>) {
        self.reading.frozen = frozen;
    }

    pub(super) fn press(&mut self, key: KeyCode, modifiers: KeyModifiers) -> Action {
        if modifiers.contains(KeyModifiers::CONTROL) {
            return match key {
                KeyCode::Char('c') => Action::Quit,
                _ => Action::Nothing,
            };
        }
        self.message.clear();
        if self.typing {
            match key {
                KeyCode::Enter => self.typing = false,
                KeyCode::Esc => (self.typing, self.filter) = (false, String::new()),
                KeyCode::Backspace => drop(self.filter.pop()),
                KeyCode::Char(c) if self.filter.len() < 60 => self.filter.push(c),
                _ => {}
            }
            return Action::Nothing;
        }
        match key {
            KeyCode::Char('q') | KeyCode::Esc => return Action::Quit,
            KeyCode::Char('r') => self.order = TopOrder::Rate,
            KeyCode::Char('b') => self.order = TopOrder::Bytes,
            KeyCode::Char('a') => self.order = TopOrder::Age,
            KeyCode::Char('n') => self.order = TopOrder::Name,
            KeyCode::Char('/') => self.typing = true,
            KeyCode::Char('p' | ' ') => self.paused = !self.paused,
            KeyCode::Up | KeyCode::Char('k') => self.select(-1),
            KeyCode::Down | KeyCode::Char('j') => self.select(1),
            KeyCode::PageUp => self.select(-10),
            KeyCode::PageDown => self.select(10),
            KeyCode::Home => self.select(isize::MIN),
            KeyCode::End => self.select(isize::MAX),
            KeyCode::Char('c') => return self.cut(),
            KeyCode::Char('f') => return self.freeze(),
            _ => {}
        }
        Action::Nothing
    }

    fn select(&mut self, by: isize) {
        let flows = self.flows();
        let at = match self.selected(&flows) {
            Some(at) => at.saturating_add_signed(by),
            None if by == isize::MAX => usize::MAX,
            None => 0,
        };
        let at = at.min(flows.len().saturating_sub(1));
        self.selected = flows.get(at).map(|flow| flow.id);
    }

    fn nothing_selected(&self, or: &str) -> String {
        let why = match self.selected {
            Some(_) => "the selected flow is gone",
            None => "nothing is selected",
        };
        format!("{why}: select a flow with the arrows{or}")
    }

    fn cut(&mut self) -> Action {
        let flows = self.flows();
        let Some(at) = self.selected(&flows) else {
            self.message = self.nothing_selected("");
            return Action::Nothing;
        };
        let flow = flows[at];
        let what = Change::Cut(target(flow));
        let words = format!("{} of {} to {}", flow.proto, flow.vm, peer(flow));
        Action::Ask(what, words)
    }

    /// The VM of the selected flow; where none is, as of a VM that is frozen for long, the only VM
    /// that is shown.
    fn freeze(&mut self) -> Action {
        let flows = self.flows();
        let vm = match (self.selected(&flows), &self.vms()[..]) {
            (Some(at), _) => flows[at].vm.to_string(),
            (None, [only]) => only.vm.clone(),
            (None, _) => {
                self.message = self.nothing_selected(", or run slipgate top --vm NAME");
                return Action::Nothing;
            }
        };
        let words = vm.clone();
        match self.is_frozen(&vm) {
            true => Action::Ask(Change::Thaw(vm), words),
            false => Action::Ask(Change::Freeze(vm), words),
        }
    }
}

/// The other end: by the name that let it in, if one did.
pub(super) fn peer(flow: &Flow) -> String {
    match (&flow.dns_name, flow.remote.port()) {
        (Some(name), Some(port)) => format!("{name}:{port}"),
        (Some(name), None) => name.clone(),
        (None, _) => flow.remote.to_string(),
    }
}

fn matches(flow: &Flow, text: &str) -> bool {
    let has = |field: &str| field.to_lowercase().contains(text);
    text.is_empty()
        || has(&flow.vm)
        || has(flow.proto)
        || has(&flow.guest.to_string())
        || has(&flow.remote.to_string())
        || flow.nat.is_some_and(|nat| has(&nat.to_string()))
        || flow.dns_name.as_deref().is_some_and(has)
        || has(&flow.rule)
}
