use std::sync::atomic::Ordering::Relaxed;

use slipgate_abi::{AtEnd, Budget, Direction, Rate, VmRates};
use slipgate_ipc::client::Target;
use slipgate_policy::document::CliOverrides;
use tempfile::TempDir;

use super::*;
use crate::{
    config::tests::config,
    kernel_state::{BudgetOrder, has_frozen, look_at, today},
    userspace::place::tests::place_of,
};

const VM: &str = "vm";

struct Rig {
    _dir: TempDir,
    place: Place,
    clients: Clients,
}

impl Rig {
    fn new() -> Self {
        let nat = config(&[VM], CliOverrides::default());
        let (dir, place) = place_of(&nat);
        let control = place.listen().unwrap();
        let clients = Clients::new(control, VM.into(), place.open.row);
        Self {
            _dir: dir,
            place,
            clients,
        }
    }

    /// A client asks for a thaw: who asked, and the request's number for the engine.
    fn ask_thaw(&mut self) -> (ClientId, u64) {
        let client = self.clients.control.take_in();
        let request = ClientRequest::Engine {
            about: Some(Target::Vm(VM.into())),
            ask: EngineRequest::Thaw,
        };
        match self.clients.request(client, request, &self.place) {
            Ok(ToEngine::Request { id, .. }) => (client, id),
            other => panic!("{other:?}"),
        }
    }

    fn freeze(&mut self) {
        let client = self.clients.control.take_in();
        let request = ClientRequest::Freeze { vm: VM.into() };
        let answer = self.clients.request(client, request, &self.place);
        assert_eq!(*answer.unwrap_err(), ClientAnswer::Done);
    }

    /// The engine is ready for a thaw. Returns the answers to clients, and whether the VM is frozen.
    fn engine_is_ready(&mut self, id: u64) -> (Vec<(ClientId, ClientAnswer)>, bool) {
        self.clients.replied(id, EngineReply::Done, &self.place);
        (self.clients.control.answers(), self.is_frozen())
    }

    fn is_frozen(&self) -> bool {
        self.place.memory.maps.is_frozen(self.place.open.row)
    }

    fn look(&self) -> Option<BudgetOrder> {
        let maps = &self.place.memory.maps;
        let about = (self.place.open.row, VM);
        look_at(maps, about, AtEnd::Freeze, today(), |_| ())
    }
}

#[test]
fn a_freeze_undoes_the_thaws_before_it_and_none_after_it() {
    let mut rig = Rig::new();
    rig.freeze();
    let (first, id) = rig.ask_thaw();
    let of_budget = rig.clients.thaw().unwrap();
    rig.freeze();
    let (second, after) = rig.ask_thaw();
    assert_eq!(rig.engine_is_ready(of_budget), (vec![], true));
    let undone = ClientAnswer::error(FROZEN_AGAIN);
    assert_eq!(rig.engine_is_ready(id), (vec![(first, undone)], true));
    let done = (second, ClientAnswer::Done);
    assert_eq!(rig.engine_is_ready(after), (vec![done], false));
}

#[test]
fn what_an_operator_froze_no_budget_thaws() {
    let mut rig = Rig::new();
    let row = rig.place.open.row;
    let limits = |budget_bytes| VmRates {
        tx: Rate {
            budget_bytes,
            ..Rate::default()
        },
        budget: Budget {
            per_day: false,
            at_end: AtEnd::Freeze,
        },
        ..VmRates::default()
    };
    rig.place.memory.maps.set_rates(row, Some(limits(100)));
    let limits_in_row = rig.place.memory.maps.rate_limits(row).unwrap();
    limits_in_row.used(Direction::Tx).store(100, Relaxed);
    assert_eq!(rig.look(), None);
    assert!(rig.is_frozen() && has_frozen(limits_in_row));
    rig.freeze();
    // A larger one.
    rig.place.memory.maps.set_rates(row, Some(limits(200)));
    assert_eq!(rig.look(), None);
    assert!(rig.is_frozen() && !has_frozen(limits_in_row));

    // Without the operator.
    let (_, id) = rig.ask_thaw();
    assert!(!rig.engine_is_ready(id).1);
    limits_in_row.used(Direction::Tx).store(200, Relaxed);
    assert_eq!(rig.look(), None);
    assert!(rig.is_frozen());
    rig.place.memory.maps.set_rates(row, Some(limits(300)));
    assert_eq!(rig.look(), Some(BudgetOrder::Thaw(row)));
}
