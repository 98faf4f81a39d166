package io.penstock.analysis;

import org.apache.lucene.analysis.Analyzer;
import org.apache.lucene.analysis.en.EnglishAnalyzer;
import org.elasticsearch.plugin.NamedComponent;
import org.elasticsearch.plugin.analysis.AnalyzerFactory;

/** The analyzer that a full Elasticsearch calls "english", for the small distribution of the local stack. */
@NamedComponent("english")
public final class EnglishAnalyzerFactory implements AnalyzerFactory {
    @Override
    public Analyzer create() {
        return new EnglishAnalyzer();
    }
}
