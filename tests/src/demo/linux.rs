//! A guest of network namespaces behind a TAP, served by `slipgate attach`: what can be shown
//! without KVM.
mod report;
mod stage;
mod workload;

use slipgate_testbed::Result;

use self::stage::Stage;
use crate::progress::Progress;

pub(crate) fn run(progress: &mut Progress) -> Result<()> {
    progress.title("slipgate: a guest behind a TAP, its NAT, and what became of each packet");
    let mut stage = Stage::set_up(progress)?;
    let seen = workload::run(&stage, progress)?;
    report::print(&stage, &seen, progress)?;
    stage.tear_down(progress)
}
