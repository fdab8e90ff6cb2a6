use super::*;

#[test]
fn each_block_has_its_turn_once() {
    for blocks in [1, 2, 3, 64, 256, 618, 2_000, 32_768, 40_000] {
        let step = step(blocks);
        let mut has_been = alloc::vec![false; blocks as usize];
        for turn in 0..blocks {
            let block = (turn * step % blocks) as usize;
            assert!(!has_been[block], "block {block} of {blocks} comes again");
            has_been[block] = true;
        }
    }
}

#[test]
fn a_block_is_not_behind_its_neighbour() {
    let (blocks, step) = (32_768, step(32_768));
    for turns in 1..64 {
        let apart = turns * step % blocks;
        assert!(apart.min(blocks - apart) > 100, "{turns} writes apart");
    }
}
