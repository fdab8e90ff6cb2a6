use super::*;
use crate::{
    attach::program_id,
    bpf,
    load::{create_and_lock, load_object},
    object,
    testing::{in_netns, options},
};

fn object_here() -> Ebpf {
    let options = options();
    let _lock = create_and_lock(&options.paths).unwrap();
    let object = object::bytes(false).unwrap();
    load_object(&options.paths, object, options.sizes).unwrap()
}

/// Those of the object that the verifier is done with soon.
const SMALL: [&str; 3] = ["guest_shut", "pacer", "guard"];

#[test]
fn each_program_is_loaded_under_its_own_name() {
    in_netns("each_program_is_loaded_under_its_own_name", || {
        let loaded = load(&mut object_here(), SMALL).unwrap();
        assert_eq!(loaded.len(), SMALL.len());
        for (name, fd) in loaded {
            let id = program_id(fd.as_fd()).unwrap();
            assert_eq!(bpf::program_name(id).as_deref(), Some(name));
        }
    });
}

#[test]
fn a_program_that_is_not_there_or_refused_is_named() {
    in_netns("a_program_that_is_not_there_or_refused_is_named", || {
        let mut ebpf = object_here();
        let missing = load(&mut ebpf, SMALL.into_iter().chain(["none"])).unwrap_err();
        let text = missing.to_string();
        assert!(
            text.contains("the program none") && text.contains("the BPF object has none"),
            "{text}"
        );
        load(&mut ebpf, ["pacer"]).unwrap();
        // A program is loaded once: it is refused, whichever thread has it.
        let refused = load(&mut ebpf, SMALL).unwrap_err().to_string();
        assert!(refused.contains("the program pacer"), "{refused}");
    });
}
