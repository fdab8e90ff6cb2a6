//! A stock Linux with a disk, by slipgate and by QEMU in turn: each is measured as on a host.

use std::{fs, path::Path};

use slipgate_testbed::{
    Error, Result,
    error::Tried,
    rig::{
        DISK_RIG, DiskRigPlan, DiskRigResult, DiskStand, DiskVmm, count_marked_blocks,
        make_disk_of_blocks,
    },
};

/// In memory: what is measured are the VMMs.
const IMAGE: &str = "/tmp/disk";

/// Whether every VMM was measured; `None` when this machine is for something else.
pub(crate) fn run() -> Option<bool> {
    let folder = Path::new(DISK_RIG);
    folder.is_dir().then(|| match measure(folder) {
        Ok(well) => well,
        Err(why) => {
            println!("FAILED disk {why}");
            false
        }
    })
}

fn measure(folder: &Path) -> Result<bool> {
    if !Path::new("/dev/kvm").exists() {
        return Err(Error::Missing("no /dev/kvm in the outer machine".into()));
    }
    let plan = folder.join("plan");
    let text = fs::read_to_string(&plan).tried(format!("read {}", plan.display()))?;
    let plan = DiskRigPlan::of_text(&text)?;
    let mut well = true;
    for vmm in plan.vmms.iter().copied() {
        let result = one(folder, vmm, &plan)?;
        well &= result.outcome.is_ok();
        println!("{result}");
    }
    Ok(well)
}

/// Measures one VMM, with an image of its own.
fn one(folder: &Path, vmm: DiskVmm, plan: &DiskRigPlan) -> Result<DiskRigResult> {
    let image = Path::new(IMAGE);
    make_disk_of_blocks(image, plan.work.blocks)?;
    let at = |name: &str| folder.join(name);
    let (kernel, initramfs, firmware) = (at("vmlinuz"), at("initramfs"), at("firmware"));
    let stand = DiskStand {
        kernel: &kernel,
        initramfs: &initramfs,
        image,
        firmware: Some(&firmware),
    };
    let outcome = vmm.measure(stand, &plan.work);
    let written = count_marked_blocks(image);
    let (outcome, written_blocks) = match (outcome, written) {
        (Ok(measured), Ok(written)) => (Ok(measured), written),
        (Err(why), written) => (Err(why.to_string()), written.unwrap_or(0)),
        (Ok(_), Err(why)) => (Err(why.to_string()), 0),
    };
    Ok(DiskRigResult {
        vmm,
        outcome,
        written_blocks,
    })
}
