use super::*;
use crate::{
    Datapath,
    attach::program_id,
    testing::{datapath, in_netns},
};

/// Ids of the programs that the twins call, in the array's order.
fn called(paths: &Paths) -> Vec<u32> {
    let array = bpf::obj_get(&paths.pin(TWINS)).unwrap();
    let id = |index: usize| {
        let (index, mut id) = (index as u32, 0_u32);
        // SAFETY: words, as the array has them; the kernel returns a program's id.
        let found = unsafe {
            bpf::lookup(
                array.as_fd(),
                (&raw const index).cast(),
                (&raw mut id).cast(),
            )
        };
        assert!(found.unwrap(), "element {index} is empty");
        id
    };
    (0..KINDS.len()).map(id).collect()
}

fn programs(datapath: &Datapath) -> Vec<u32> {
    let id = |(program, _)| program_id(datapath.program(program).unwrap()).unwrap();
    KINDS.into_iter().map(id).collect()
}

#[test]
fn a_start_has_the_verifier_look_at_each_program_once() {
    in_netns("a_start_has_the_verifier_look_at_each_program_once", || {
        let datapath = datapath();
        for program in Program::ALL {
            let verified = |fd| bpf::prog_info(fd).unwrap().verified_insns;
            let Some(twin) = datapath.twin(program) else {
                assert!(program.twin_name().is_none(), "{program:?}");
                continue;
            };
            let (twin, itself) = (verified(twin), verified(datapath.program(program).unwrap()));
            assert!(twin <= 6 && itself > 1_000, "{program:?}: {twin}, {itself}");
        }
    });
}

#[test]
fn twins_call_the_programs_of_the_build_in_force() {
    in_netns("twins_call_the_programs_of_the_build_in_force", || {
        let first = datapath();
        let paths = first.paths().clone();
        assert_eq!(called(&paths), programs(&first));
        // The same build joins them.
        let second = datapath();
        assert_eq!(programs(&second), programs(&first));
        assert_eq!(called(&paths), programs(&first));
        drop((first, second));
        assert_eq!(called(&paths).len(), KINDS.len(), "by the pin alone");
        // As another build left it.
        let before = called(&paths);
        fs::write(paths.run_dir.join(crate::paths::BUILD_FILE), "another").unwrap();
        let third = datapath();
        assert_eq!(called(&paths), programs(&third));
        assert!(called(&paths).iter().all(|id| !before.contains(id)));
        // Nobody's: the twins are made anew with the programs.
        fs::remove_file(paths.pin(TWINS)).unwrap();
        assert_eq!(called(datapath().paths()).len(), KINDS.len());
    });
}
