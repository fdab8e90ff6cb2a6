//! `slipgate ps`: the machines of `slipgate run` on this host.
use slipgate_ipc::client::MachineStatus;

use super::{print_once, table::table};
use crate::{args::PsArgs, log, machines::Machines};

/// Lists the machines of this host.
pub(super) fn run(args: &PsArgs) -> anyhow::Result<()> {
    let machines = Machines::ask()?;
    for pid in &machines.silent {
        log::say(format_args!(
            "the `slipgate run` with the process id {pid} does not answer"
        ));
    }
    let all: Vec<&MachineStatus> = machines.found.iter().map(|found| &found.status).collect();
    if args.json {
        return print_once(&format!("{}\n", serde_json::to_string_pretty(&all)?));
    }
    let row = |machine: &&MachineStatus| {
        vec![
            machine.name.clone(),
            machine.pid.to_string(),
            machine.state.name().to_owned(),
            machine.cpus.to_string(),
            machine.memory_mib.to_string(),
            machine.tap.clone().unwrap_or_else(|| "-".to_owned()),
            machine.runs_s.to_string(),
        ]
    };
    let rows: Vec<_> = all.iter().map(row).collect();
    let head = ["VM", "PID", "STATE", "CPUS", "MIB", "TAP", "SECONDS"];
    print_once(&table(&head, &rows, &[1, 3, 4, 6]))
}
