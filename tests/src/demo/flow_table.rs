//! Flows as `slipgate flows` has them.

use slipgate_testbed::slipgate::FlowRow;

use crate::progress::{Progress, bytes, grouped};

/// Number of flows that are shown.
const SHOWN_FLOWS: usize = 6;

/// The largest flows, as of the moment in the upload at which they were asked for.
pub(crate) fn print(flows: &[FlowRow], progress: &mut Progress) {
    progress.heading(&format!(
        "Flows at a moment in the upload, not at its end (slipgate flows; the {SHOWN_FLOWS} largest \
         of {})",
        grouped(flows.len() as u64)
    ));
    let mut largest: Vec<&FlowRow> = flows.iter().collect();
    largest.sort_by_key(|flow| std::cmp::Reverse(flow.tx_bytes + flow.rx_bytes));
    let row = |cells: [&str; 8]| {
        let [proto, guest, remote, nat, verdict, state, tx, rx] = cells;
        format!(
            "  {proto:<5} {guest:<16} {remote:<17} {nat:<16} {verdict:<7} {state:<11} {tx:>9} {rx:>9}"
        )
    };
    progress.line(&row([
        "",
        "guest",
        "remote",
        "translated",
        "verdict",
        "state",
        "sent",
        "got",
    ]));
    for flow in largest.iter().take(SHOWN_FLOWS) {
        progress.line(&row([
            &flow.proto,
            &flow.guest,
            &flow.remote,
            &flow.nat,
            &flow.verdict,
            &flow.state,
            &bytes(flow.tx_bytes),
            &bytes(flow.rx_bytes),
        ]));
    }
}
